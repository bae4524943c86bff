"""Messages between the processes that write checkpoints."""

import os
import socket
import threading

from megatron.core.dist_checkpointing.sockets_between_writers import MessageSocket


def test_a_message_is_one_write():
    """TCP holds a second write back until the first is acknowledged, some 40 ms later."""
    end, other = socket.socketpair(type=socket.SOCK_SEQPACKET)  # which gives each write by itself
    MessageSocket(end).send({"step": 1})
    assert other.recv(1 << 16).endswith(b'{"step": 1}')
    end.close()
    other.close()


def test_a_message_larger_than_a_socket_takes_at_once_arrives_whole_with_its_handle():
    one, other = (MessageSocket(end) for end in socket.socketpair())
    text = "x" * (4 << 20)
    thread = threading.Thread(target=one.send, args=({"text": text}, 0))
    thread.start()
    assert other.receive() == {"text": text}
    thread.join()
    assert len(other.handles) == 1
    os.close(other.handles.pop())
    one.close()
    other.close()
