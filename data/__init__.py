"""Datasets: prepared.py opens them, loader.py makes batches, writer.py writes them; each folder has its prepare.py."""
