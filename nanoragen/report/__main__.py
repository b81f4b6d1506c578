from nanoragen.report.page import main

if __name__ == "__main__":
    main()
