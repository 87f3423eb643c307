from engine.cli import main

main("qwen")
