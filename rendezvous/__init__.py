"""Membership, key-value stores, rank table, bootstrap store (imported as flashrun.rendezvous)."""
