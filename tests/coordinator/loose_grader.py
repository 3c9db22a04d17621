"""The toy grading child without its confinement: what the limits are measured against."""

from coordinator import grader_worker
from tests.coordinator.toy_grader import arrange

if __name__ == "__main__":
    arrange()
    grader_worker.confine = lambda: None
    grader_worker.main()
