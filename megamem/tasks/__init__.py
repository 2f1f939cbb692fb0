"""Tasks: problems, prompts and rewards. `megamem.tasks.registry.load_task` is the way in."""
