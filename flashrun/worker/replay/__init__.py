"""Catch-up as a deterministic replay of the script (DESIGN.md, section 4, rules 5, 6 and 10)."""
