import { Button, Title } from "@mantine/core";
import { Link } from "@tanstack/react-router";
import { shareOf } from "@/api/routes";
import type { Arm, Route } from "@/api/types";
import { percent } from "@/ui/format";
import { Id } from "@/ui/Id";
import classes from "./Routes.module.css";
import { armColor, ShareBar } from "./ShareBar";

interface RouteCardProps {
  route: Route;
  writable: boolean;
  onEdit: () => void;
  onDelete: () => void;
}

export function RouteCard({ route, writable, onEdit, onDelete }: RouteCardProps) {
  return (
    <article className={classes.route} aria-label={`Route ${route.name}`}>
      <div className={classes.head}>
        <Title order={2} className="mono">
          {route.name}
        </Title>
        <span className={classes.soft}>
          {route.sticky ? "each user or API key stays on one arm" : "each request is drawn anew"}
        </span>
        <span className={classes.spacer} />
        <Button
          variant="default"
          size="compact-xs"
          renderRoot={(root) => <Link to="/requests" search={{ model: route.name }} {...root} />}
        >
          Requests
        </Button>
        {writable && <Orders onEdit={onEdit} onDelete={onDelete} />}
      </div>
      <ShareBar arms={route.arms} />
      <ul className={classes.arms}>
        {route.arms.map((arm, index) => (
          <ArmRow key={arm.name} arm={arm} arms={route.arms} index={index} />
        ))}
      </ul>
    </article>
  );
}

function Orders({ onEdit, onDelete }: Pick<RouteCardProps, "onEdit" | "onDelete">) {
  return (
    <>
      <Button variant="default" size="compact-xs" onClick={onEdit}>
        Edit
      </Button>
      <Button variant="subtle" color="red" size="compact-xs" onClick={onDelete}>
        Delete
      </Button>
    </>
  );
}

function ArmRow({ arm, arms, index }: { arm: Arm; arms: Arm[]; index: number }) {
  return (
    <li className={classes.arm}>
      <span
        aria-hidden
        style={{ width: 8, height: 8, borderRadius: 2, background: armColor(index) }}
      />
      <span className="mono">{arm.name}</span>
      <span>
        <Id value={arm.version_id} />
      </span>
      <span className={classes.soft}>weight {arm.weight}</span>
      <span>{percent(shareOf(arm, arms), 1)}</span>
    </li>
  );
}
