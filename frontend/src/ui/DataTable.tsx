import { Skeleton } from "@mantine/core";
import type { MouseEvent, ReactNode } from "react";
import classes from "./DataTable.module.css";

export interface Column<T> {
  title: string;
  cell: (row: T) => ReactNode;
  right?: boolean;
  /** Left out on a phone. */
  minor?: boolean;
  /** The last one: in view on a phone whatever is scrolled, since a number cut off looks whole. */
  pinned?: boolean;
}

interface DataTableProps<T> {
  label: string;
  columns: Column<T>[];
  rows: T[] | undefined;
  rowKey: (row: T) => string;
  /** A convenience for the pointer; the row's own link or button serves the keyboard. */
  onRowClick?: (row: T) => void;
  /** The row that stands out, such as the one that was chosen. */
  isMarked?: (row: T) => boolean;
}

/** A plain table. `rows` undefined means still loading. */
export function DataTable<T>(props: DataTableProps<T>) {
  const { label, columns, rows } = props;
  return (
    <div className={classes.wrap}>
      <table className={classes.table} aria-label={label} aria-busy={rows === undefined}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column.title} scope="col" className={cellClass(column)}>
                {column.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{rows ? rows.map((row) => renderRow(props, row)) : skeleton(columns)}</tbody>
      </table>
    </div>
  );
}

function cellClass<T>(column: Column<T>): string {
  const kinds = ["right", "minor", "pinned"] as const;
  return kinds
    .filter((kind) => column[kind])
    .map((kind) => classes[kind])
    .join(" ");
}

function renderRow<T>({ columns, rowKey, onRowClick, isMarked }: DataTableProps<T>, row: T) {
  const click = onRowClick && ((event: MouseEvent) => isPlain(event) && onRowClick(row));
  return (
    <tr
      key={rowKey(row)}
      className={`${classes.row} ${click ? classes.clickable : ""}`}
      aria-current={isMarked?.(row) || undefined}
      onClick={click}
    >
      {columns.map((column) => (
        <td key={column.title} className={cellClass(column)}>
          {column.cell(row)}
        </td>
      ))}
    </tr>
  );
}

/** A click on a control inside the row, or one that ends a text selection, is not for the row. */
function isPlain(event: MouseEvent): boolean {
  const target = event.target as HTMLElement;
  return !target.closest("a, button, input") && !window.getSelection()?.toString();
}

function skeleton<T>(columns: Column<T>[]) {
  return ["a", "b", "c"].map((row) => (
    <tr key={row}>
      {columns.map((column) => (
        <td key={column.title} className={cellClass(column)}>
          <Skeleton height={10} my={5} />
        </td>
      ))}
    </tr>
  ));
}
