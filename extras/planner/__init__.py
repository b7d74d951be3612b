"""--dry-run: what a run will need, from one simulated step. Nothing that trains is in here."""
