"""Losses of reward models and process models. No model code."""
