"""A sliding puzzle to train a vision-language model on, with the generator and the recipes of skyrl_maze.

puzzle -> picture -> env    the environment, which knows no trainer
task                        what the launcher must know of it
cpu.yaml, gpu.yaml          recipes: `+recipe=sliding_puzzle:cpu`
"""
