"""Measuring variants against each other: shapes, runs, reports."""
