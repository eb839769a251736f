"""Knowledge graphs: TransE, ERNIE and its tasks, KagNet. No other room imports it; `systems.py` registers it."""
