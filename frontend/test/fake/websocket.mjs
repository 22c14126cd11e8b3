/** Just enough of RFC 6455 for a development server: text frames, close, no fragments. */
import { createHash } from "node:crypto";

const GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

export function accept(request, socket, onText, onClose) {
  const key = createHash("sha1").update(request.headers["sec-websocket-key"] + GUID);
  socket.write(
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" +
      `Sec-WebSocket-Accept: ${key.digest("base64")}\r\n\r\n`,
  );
  let pending = Buffer.alloc(0);
  socket.on("data", (chunk) => {
    pending = Buffer.concat([pending, chunk]);
    for (let frame = decode(pending); frame; frame = decode(pending)) {
      pending = pending.subarray(frame.size);
      if (frame.opcode === 8) socket.end(encode(8, frame.payload));
      else if (frame.opcode === 1) onText(frame.payload.toString());
    }
  });
  socket.on("error", () => socket.destroy());
  socket.on("close", onClose);
  return (message) =>
    socket.writable && socket.write(encode(1, Buffer.from(JSON.stringify(message))));
}

function decode(data) {
  if (data.length < 6) return null;
  let length = data[1] & 127;
  let at = 2;
  if (length === 126) {
    length = data.readUInt16BE(2);
    at = 4;
  }
  if (data.length < at + 4 + length) return null;
  const mask = data.subarray(at, at + 4);
  const payload = Buffer.from(data.subarray(at + 4, at + 4 + length));
  for (let index = 0; index < length; index++) payload[index] ^= mask[index % 4];
  return { opcode: data[0] & 15, payload, size: at + 4 + length };
}

function encode(opcode, payload) {
  const { length } = payload;
  if (length < 126) return Buffer.concat([Buffer.from([128 | opcode, length]), payload]);
  const head = Buffer.alloc(length < 65536 ? 4 : 10);
  head[0] = 128 | opcode;
  head[1] = length < 65536 ? 126 : 127;
  if (length < 65536) head.writeUInt16BE(length, 2);
  else head.writeBigUInt64BE(BigInt(length), 2);
  return Buffer.concat([head, payload]);
}
