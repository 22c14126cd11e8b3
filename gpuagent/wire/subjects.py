"""Names on the bus. A node may publish and subscribe only where its own id stands.

======================  ==============================  ===========================================
what                    subject or bucket               direction
======================  ==============================  ===========================================
desired state           KV ``desired``, key node        control plane -> node, whole value
observed state          KV ``observed``, key node       node -> control plane, whole value
telemetry               ``engine.telemetry.<node>``     node -> all, every 2 s
start a generation      ``engine.generate.<node>``      gateway -> node
cancel                  ``engine.cancel.<node>``        gateway -> node
resend after a gap      ``engine.resend.<node>``        gateway -> node
end a lost gateway's    ``engine.close.<node>``         another gateway -> node
what those produced     ``engine.closed.<gw>.<node>``   node -> that other gateway
frames                  ``engine.frames.<gw>.<node>``   node -> gateway
tokenizers              object store ``tokenizers``     node -> gateways, name = version id
======================  ==============================  ===========================================
"""

DESIRED_BUCKET = "desired"
OBSERVED_BUCKET = "observed"
TOKENIZER_BUCKET = "tokenizers"
NODE_JETSTREAM = "engine.js"  # a node's prefix for the JetStream API, which is another account's
TELEMETRY_ALL = "engine.telemetry.*"


def telemetry(node_id: str) -> str:
    return f"engine.telemetry.{node_id}"


def generate(node_id: str) -> str:
    return f"engine.generate.{node_id}"


def cancel(node_id: str) -> str:
    return f"engine.cancel.{node_id}"


def resend(node_id: str) -> str:
    return f"engine.resend.{node_id}"


def close(node_id: str) -> str:
    return f"engine.close.{node_id}"


def closed(gateway_id: str, node_id: str) -> str:
    return f"engine.closed.{gateway_id}.{node_id}"


def closed_of(gateway_id: str) -> str:
    return f"engine.closed.{gateway_id}.*"


def frames(gateway_id: str, node_id: str) -> str:
    return f"engine.frames.{gateway_id}.{node_id}"


def frames_of(gateway_id: str) -> str:
    return f"engine.frames.{gateway_id}.*"
