"""A Lightning job: DDP over gloo, a validation loop, a checkpoint callback, logged metrics."""

import os

import lightning as L
import torch
from common import RANK, leave, mse, net, shown
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.history = []

    def training_step(self, batch, index):
        loss = mse(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", mse(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        self.history.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Show(Callback):
    def on_train_batch_end(self, trainer, *args):
        shown(trainer.global_step)


L.seed_everything(5, verbose=False)
data = TensorDataset(torch.randn(240, 16), torch.randn(240, 1))
held_out = TensorDataset(torch.randn(48, 16), torch.randn(48, 1))
module = Module()
trainer = L.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=1, max_epochs=6,
    strategy=L.pytorch.strategies.DDPStrategy(process_group_backend="gloo"),
    logger=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=5,
    callbacks=[Show(), ModelCheckpoint("checkpoints", "{epoch}", monitor="val", save_top_k=2)],
)  # fmt: skip
L.seed_everything(100 + RANK, verbose=False)
trainer.fit(
    module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(held_out, batch_size=8)
)
leave(
    model=module.state_dict(), optimizer=trainer.optimizers[0].state_dict(),
    step=trainer.global_step, history=module.history,
)  # fmt: skip
