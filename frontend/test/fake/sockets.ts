/** The browser's WebSocket, with the test at its other end. */
export class FakeSocket {
  static opened: FakeSocket[] = [];
  static readonly OPEN = 1;

  readyState = 0;
  sent: Record<string, unknown>[] = [];
  onopen: () => void = () => {};
  onmessage: (message: { data: string }) => void = () => {};
  onclose: (closing: { code: number; reason: string }) => void = () => {};

  constructor(readonly url: string) {
    FakeSocket.opened.push(this);
  }

  static to(path: string): FakeSocket {
    const socket = FakeSocket.opened.findLast((each) => each.url.includes(path));
    if (!socket) throw new Error(`no socket was opened to ${path}`);
    return socket;
  }

  send(text: string): void {
    this.sent.push(JSON.parse(text));
  }

  close(): void {
    this.drop(1000);
  }

  // --- what the server does -------------------------------------------------------------------

  accept(): void {
    this.readyState = FakeSocket.OPEN;
    this.onopen();
  }

  receive(message: object): void {
    this.onmessage({ data: JSON.stringify(message) });
  }

  drop(code = 1006): void {
    if (this.readyState === 3) return;
    this.readyState = 3;
    this.onclose({ code, reason: "" });
  }
}
