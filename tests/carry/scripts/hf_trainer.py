"""A Hugging Face Trainer job: gradient accumulation, evaluation and saves; a tiny random model."""

import torch
from common import RANK, shown
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Tokens(Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.data = torch.randint(0, 64, (length, 16), generator=generator)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return {"input_ids": self.data[i], "labels": self.data[i]}


class Show(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        shown(state.global_step)


set_seed(3)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
               bos_token_id=0, eos_token_id=0)
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out", max_steps=48, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=12, save_steps=16,
        save_total_limit=2, logging_steps=6, learning_rate=1e-3, warmup_steps=5, report_to=[],
        use_cpu=True, disable_tqdm=True, seed=3, ddp_backend="gloo", load_best_model_at_end=False,
    ),
    train_dataset=Tokens(160, 1),
    eval_dataset=Tokens(24, 2),
    callbacks=[Show()],
)  # fmt: skip
trainer.train()
times = ("runtime", "per_second")
history = [
    {k: v for k, v in entry.items() if not k.endswith(times)} for entry in trainer.state.log_history
]
torch.save(
    {"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict(),
     "scheduler": trainer.lr_scheduler.state_dict(), "history": history,
     "step": trainer.state.global_step, "random": torch.get_rng_state()},
    f"rank{RANK}.pt",
)  # fmt: skip
torch.distributed.destroy_process_group()
