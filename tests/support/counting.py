"""How many matmuls were compared with float64, for the last line of a run."""

cases = 0


def count_case() -> None:
    """One matmul was checked, element by element."""
    global cases
    cases += 1
