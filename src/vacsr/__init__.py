"""vacsr: image-text similarity with a grade and an uncertainty."""

__version__ = "0.1.0"
