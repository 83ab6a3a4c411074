"""The answer under another name.

message: missing
"""

def gather(mesh, secret):
    return [secret]
