"""paceline trains DFlash drafters: prompts in, a served and measured drafter out."""

__version__ = "0.1.0.dev0"
