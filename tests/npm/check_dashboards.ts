// Our dashboards against Grafana's own types: `tsc --noEmit` fails where a field is unknown, missing or of another type.
// A string enum takes its value as text, as JSON must (Plain). The dashboards are put in as literals by the test, so
// that TypeScript refuses fields that the schema does not have.
import type { Dashboard, Panel } from "@grafana/schema/dist/types/raw/dashboard/x/types.gen";
import type { FieldConfig, Options } from "@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen";

type Plain<T> = T extends string ? `${T}` : T extends (infer Item)[] ? Plain<Item>[] : T extends object ? { [Key in keyof T]: Plain<T[Key]> } : T;
type Defaults = Omit<NonNullable<NonNullable<Panel["fieldConfig"]>["defaults"]>, "custom"> & { custom: FieldConfig };
type LinesPanel = Omit<Panel, "options" | "fieldConfig" | "type"> & {
  type: "timeseries";
  options: Options;
  fieldConfig: Omit<NonNullable<Panel["fieldConfig"]>, "defaults"> & { defaults: Defaults };
};
type Ours = Plain<Omit<Dashboard, "panels">> & { panels: Plain<LinesPanel>[] };

export const dashboards: Ours[] = [
  /* DASHBOARDS */
];
