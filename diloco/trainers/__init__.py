"""Islands in trainers of other projects: a module for each trainer, which needs its package."""
