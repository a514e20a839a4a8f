"""Weights from every training rank to every engine rank, each the part it needs: routes, and the two sides."""
