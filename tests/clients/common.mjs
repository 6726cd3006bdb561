// What the scripts share: the tool, and how they say what they saw. Each fails by its exit code.
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
export const CITIES = ["Rome", "Oslo"];

export function told(what, right, seen) {
  console.log(JSON.stringify({ what, right }));
  if (!right) {
    console.error(what, JSON.stringify(seen));
    process.exit(1);
  }
}
