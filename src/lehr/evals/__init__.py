"""Measuring: suites, statistics, comparison."""
