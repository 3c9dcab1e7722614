"""A world small enough to check: drawn pictures, two tiny base models that know them, a concept they do not know."""
