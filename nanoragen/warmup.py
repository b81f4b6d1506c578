"""`python -m nanoragen.warmup`: how the bundled model was made (nanoragen/science/warmup.py)."""

from nanoragen.science.warmup import main

if __name__ == "__main__":
    main()
