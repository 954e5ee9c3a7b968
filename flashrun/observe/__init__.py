"""Events, metrics, what a person reads."""
