"""A world small enough to verify: drawn images, two tiny base models trained on them, and a concept new to both."""
