"""Mechanism shared by every communication hook; knows no framework and no algorithm."""
