"""Datasets: one folder each with its prepare.py, and loader.py, which they and train.py share."""
