from engine.cli import main

main("qwen1_5")
