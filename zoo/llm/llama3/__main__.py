from engine.cli import main

main("llama3")
