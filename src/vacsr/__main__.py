"""``python -m vacsr``: the command line where its script is not on the path."""

from vacsr.cli import main

if __name__ == "__main__":  # workers that are started afresh import this file too
    main()
