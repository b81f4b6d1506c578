"""`python -m nanoragen.reproduce`: the paper's claims, tried (nanoragen/science/reproduce.py)."""

from nanoragen.science.reproduce import main

if __name__ == "__main__":
    main()
