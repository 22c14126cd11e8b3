"""The only place that chooses adapters: builds each process from its parts."""
