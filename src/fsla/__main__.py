from fsla.cli import main

main()
