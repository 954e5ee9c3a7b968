"""Decisions: fault classes, plans, the controller."""
