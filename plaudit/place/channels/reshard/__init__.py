"""Weights from every training rank to every engine rank, each the shard it needs: routes, and the two sides."""
