"""`python -m minifloat`."""

from minifloat.cli import main

if __name__ == "__main__":
    main()
