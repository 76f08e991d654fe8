import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for queue_house, and queue_peer, which is also a program
