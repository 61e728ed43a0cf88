"""The lowest floor, which everything else may use: lines for the user, and ranges in profiles."""
