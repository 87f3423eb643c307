from engine.cli import main

main("deepseek_v32")
