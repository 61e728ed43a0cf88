"""The lowest floor, which everything else may use: lines for the user, ranges in profiles, and copies of models."""
