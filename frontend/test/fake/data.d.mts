// biome-ignore lint/suspicious/noExplicitAny: rows of many shapes, checked by what the pages show
type Row = any;
export function event(position: number): Row;
export function requestRecord(number: number, part?: object): Row;
export function newState(): Record<string, Row>;
