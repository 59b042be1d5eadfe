"""stub"""
from typing import Any
def server_problems(a: Any) -> list: return []
def request_problems(r: Any) -> list: return []
