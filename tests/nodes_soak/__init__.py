"""Many membership events in one seeded run; see :mod:`tests.nodes_soak.soak`."""
