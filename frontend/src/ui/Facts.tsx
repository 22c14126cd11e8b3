import { Fragment, type ReactNode } from "react";
import classes from "./Facts.module.css";

/** Names and values, for details. */
export function Facts({ items }: { items: [string, ReactNode][] }) {
  return (
    <dl className={classes.facts}>
      {items.map(([name, value]) => (
        <Fragment key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </Fragment>
      ))}
    </dl>
  );
}
