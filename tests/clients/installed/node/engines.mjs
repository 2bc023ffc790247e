// The engines of LATIMER_URLS, as [name, base URL].
export const engines = process.env.LATIMER_URLS.split(" ").map((one) => {
  const at = one.indexOf("=");
  return [one.slice(0, at), `${one.slice(at + 1)}/v1`];
});
export const ASK = "What is the capital of France?";
export const ANSWER = "The capital of France is Paris.";
export const WEATHER = "What is the weather in Paris?";
export const TOM = "Give me JSON for Tom, age 33.";
export const LONG = "word ".repeat(5000);
