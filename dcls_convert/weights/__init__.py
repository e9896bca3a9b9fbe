"""Read weights from files, choose and rename them, and load them into a network."""
