import { Link } from "@tanstack/react-router";
import { NAV, type NavItem } from "./nav";
import classes from "./Shell.module.css";

export function Nav({ onNavigate }: { onNavigate: () => void }) {
  return NAV.map((group) => (
    <div key={group.title} className={classes.group}>
      <div className={classes.groupTitle}>{group.title}</div>
      {group.items.map((item) => (
        <NavLink key={item.to} item={item} onNavigate={onNavigate} />
      ))}
    </div>
  ));
}

function NavLink({ item, onNavigate }: { item: NavItem; onNavigate: () => void }) {
  return (
    <Link to={item.to} className={classes.link} onClick={onNavigate}>
      <item.icon size={16} stroke={1.7} aria-hidden />
      {item.label}
    </Link>
  );
}
