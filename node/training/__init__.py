"""The trainer's mathematics: loss, gradient, warm-up and evaluation. Imported by the trainer child alone."""
