import { Title } from "@mantine/core";
import { type ReactNode, useEffect } from "react";
import classes from "./Page.module.css";

interface PageProps {
  title: string;
  heading?: ReactNode;
  sub?: ReactNode;
  actions?: ReactNode;
  children: ReactNode;
}

/** A page's frame: heading, one line about it, its actions. */
export function Page({ title, heading, sub, actions, children }: PageProps) {
  useEffect(() => {
    document.title = `${title} · Engine`;
  }, [title]);
  return (
    <div className={classes.page}>
      <header className={classes.head}>
        <div className={classes.titles}>
          <Title order={1} className={classes.title}>
            {heading ?? title}
          </Title>
          {sub && <p className={classes.sub}>{sub}</p>}
        </div>
        {actions && <div className={classes.actions}>{actions}</div>}
      </header>
      {children}
    </div>
  );
}

interface SectionProps {
  title: string;
  actions?: ReactNode;
  children: ReactNode;
}

export function Section({ title, actions, children }: SectionProps) {
  return (
    <section className={classes.section} aria-label={title}>
      <div className={classes.sectionHead}>
        <Title order={2}>{title}</Title>
        {actions && <div className={classes.actions}>{actions}</div>}
      </div>
      {children}
    </section>
  );
}
